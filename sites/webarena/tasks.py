"""WebArena's task files -> task objects of one schema, with `__SITE__` in place of every address of a site.

Read as published: WebArena's 812 (and its older examples), VisualAgentBench's 165, ScaleCUA's 154 (UTF-8 or
GBK, raw or with addresses filled in), WebAgent-R1's 647 in both versions. A task keeps the published keys;
null, {} and "" all mean nothing, and must_include is a list.
"""

import contextlib
import json
import re
from pathlib import Path

from runtime import UserError
from sites.webarena.replicas import DOORS, KNOWN, Site
from sites.webarena.score import problems

FILES = {"all812": ("webarena/test.raw.json", "all812.json"),
         "lite165": ("visualagentbench/test_webarena_lite.raw.json", "lite165.json",
                     "browsergym/webarenalite/test_webarena_lite.raw.json"),
         "lite_v2": ("scalecua/webarena_lite_v2/test.raw.json", "lite_v2.json"),
         "train647": ("train647.json",)}    # split -> names in a folder; the last can also be derived
PLACEHOLDER = re.compile(r"__([A-Z][A-Z_]*?)__")
AND = " |AND| "


# ------------------------------------------------------------------------------------------------- reading
def read_split(source: str, split: str) -> tuple[list[dict], str]:
    """The tasks of a split and the first part of their ids. A `source` that is a file is all of them."""
    path = Path(source or ".")
    if source and not path.is_dir():
        return read_tasks(path), path.stem
    if split not in FILES:
        raise UserError(f"webarena has no split {split!r}; choose one of {', '.join(FILES)}, or name a file "
                        f"with --tasks")
    found = next((path / name for name in FILES[split] if (path / name).is_file()), None)
    if found is not None:
        return read_tasks(found), split
    if split == "train647":
        return derive_train(read_split(source, "all812")[0], read_split(source, "lite165")[0]), split
    raise UserError(f"split {split}: no {' or '.join(FILES[split])} in {path}; --tasks names a task file, or "
                    f"the folder with the task files")


def read_tasks(path) -> list[dict]:
    """The task objects of a file; UserError for a file that holds none."""
    if not Path(path).is_file():
        raise UserError(f"task file {path}: no such file; docs/webarena.md says where to get one")
    data = Path(path).read_bytes()
    for encoding in ("utf-8-sig", "gbk"):       # ScaleCUA writes its substituted file in GBK
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode(encoding)
            break
    else:
        raise UserError(f"task file {path}: neither UTF-8 nor GBK; give the file as it was published")
    try:
        tasks = json.loads(text)
    except ValueError as e:
        raise UserError(f"task file {path}: not JSON ({e}); give the file as it was published") from None
    tasks = tasks if isinstance(tasks, list) else [tasks]
    for i, task in enumerate(tasks):
        if not isinstance(task, dict) or not isinstance(task.get("intent"), str) or "task_id" not in task:
            raise UserError(f"task file {path}: entry {i} is no task (it needs task_id and intent)")
    if not any("eval" in t for t in tasks):
        raise UserError(f"task file {path}: holds no task with an evaluator; give one of the published files")
    return [normal(task) for task in tasks]


def normal(task: dict) -> dict:
    """One schema for all files."""
    rules = dict(task.get("eval") or {})
    answers = rules.get("reference_answers") or {}
    answers = {"must_include": answers} if isinstance(answers, list) else answers  # its older schema
    targets = [t | {"required_contents": _listed(t.get("required_contents"))}
               for t in rules.get("program_html") or []
               if any(t.get(key) for key in ("url", "locator", "required_contents"))]
    rules |= {"eval_types": list(rules.get("eval_types") or []), "reference_answers": _listed(answers),
              "reference_url": rules.get("reference_url") or "", "program_html": targets}
    return task | {"eval": rules, "sites": list(task.get("sites") or [])} | {
        key: task.get(key) or "" for key in ("start_url", "storage_state")}


def _listed(rules):
    """must_include as a list also where a file has a text."""
    if not isinstance(rules, dict):
        return rules
    return {k: [v] if k == "must_include" and isinstance(v, str) else v for k, v in rules.items()}


def derive_train(all812: list[dict], lite165: list[dict]) -> list[dict]:
    """PAPER-GAP 15: the training tasks are those of the 812 that no task of the 165 was made from."""
    taken = {t["old_task_id"] for t in lite165}
    return [t for t in all812 if t["task_id"] not in taken]


def apply_patch(tasks: list[dict], path) -> int:
    """Repair annotations from {task_id: {"eval": {...}}}, merged key by key; returns how many tasks changed.
    """
    try:
        patch = json.loads(Path(path).read_text(encoding="utf-8"))
        by_id = {str(t["task_id"]): t for t in tasks}
        for task_id, change in patch.items():
            rules = by_id[task_id]["eval"] | change.get("eval", {})
            by_id[task_id] |= normal(by_id[task_id] | change | {"eval": rules})
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise UserError(f"patch file {path}: {e}; give an object of changes by task_id") from None
    except KeyError as e:
        raise UserError(f"patch file {path}: there is no task {e} to change") from None
    return len(patch)


# ------------------------------------------------------------------------------------------------ addresses
def rewrite(thing, replace):
    """`replace` on every string of a JSON value."""
    if isinstance(thing, str):
        return replace(thing)
    if isinstance(thing, dict):
        return {k: rewrite(v, replace) for k, v in thing.items()}
    return [rewrite(v, replace) for v in thing] if isinstance(thing, list) else thing


def to_placeholders(task: dict, sites: dict[str, Site | None]) -> dict:
    """Addresses of the sites file back to `__SITE__`, for files in which they are filled in already."""
    known = sorted(((r.address, f"__{s.name.upper()}__") for s in sites.values() if s for r in s.replicas),
                   key=lambda pair: -len(pair[0]))

    def replace(text):
        for address, placeholder in known:
            text = re.sub(re.escape(address) + r"(?![\w.:-])", placeholder, text)
        return text
    return rewrite(task, replace)


def bind(task: dict, addresses: dict[str, str], name: str) -> dict:
    """Every `__SITE__` replaced by its address; UserError naming the task where one is left."""
    bound = rewrite(task, lambda text: PLACEHOLDER.sub(lambda m: addresses.get(m[1].lower(), m[0]), text))
    if left := PLACEHOLDER.search(json.dumps(bound)):
        raise UserError(f"task {name}: the placeholder {left[0]} has no address; add {left[1].lower()!r} to "
                        f"the sites file")
    return bound


def sites_of(task: dict) -> list[str]:
    """The sites that a task needs: those it lists and those it mentions."""
    mentioned = {m.lower() for m in PLACEHOLDER.findall(json.dumps(task))}
    return sorted(mentioned | (KNOWN & set(task["sites"])))


def members_of(task: dict) -> list[str]:
    """The sites to log in to, by the name of the storage state: gitlab.reddit_state.json -> gitlab, reddit.
    """
    names = Path(task["storage_state"]).name.rsplit("_", 1)[0].split(".")
    return [name for name in names if name in DOORS]


def starts_of(task: dict) -> list[str]:
    return [url.strip() for url in task["start_url"].split(AND)]


def changes_state(task: dict) -> bool:
    """Tasks that are scored on a page's contents are those that make something there."""
    return "program_html" in task["eval"]["eval_types"]


def task_problems(task: dict, sites: dict[str, Site | None]) -> list[str]:
    """Everything that would keep a task from being run or scored."""
    found = problems(task["eval"])
    found += [f"the site {name!r} is missing in the sites file"
              for name in sites_of(task) if name not in sites]
    return found + [f"the start page {url!r} is no address" for url in starts_of(task)
                    if not re.match(r"https?://|__[A-Z_]+__", url)]
