"""The episode viewer: viewer.html filled with the episodes of one or more runs, for analysis.py."""

import base64
import hashlib
import json
import os
from pathlib import Path

import runtime
from records.results import directory_of, facts, rounded


def viewer_page(runs: dict[str, tuple[Path, list[dict]]], out: Path, inline: bool) -> bytes:
    """The page that will stand at `out`, opens from disk and needs no network. `runs`: (path, episodes) by
    name; `inline` puts the screenshots into the page instead of referring to the files."""
    shown = []
    images: dict[str, str] = {}
    for i, (name, (path, episodes)) in enumerate(runs.items()):
        folder = directory_of(path)
        prefix = Path(os.path.relpath(folder.resolve(), out.parent.resolve())).as_posix()
        scale = facts(path).get("scale", 1.0)  # pixels of a screenshot per pixel of the page
        shown.append({"name": name, "prefix": prefix, "scale": scale, "episodes": episodes})
        if inline:
            images |= {f"{i}/{shot}": text for shot, text in screenshots(folder, episodes).items()}
    # no "<" is left in the data, so no text of a model can end the block that holds it
    blob = json.dumps(rounded({"runs": shown, "images": images}), ensure_ascii=False, allow_nan=False)
    template = (runtime.ROOT / "records" / "viewer.html").read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, after = template.replace("@HASH@", f"sha256-{digest}").partition("@DATA@")
    return (before + blob.replace("<", "\\u003c") + after).encode("utf-8", "replace")


def screenshots(folder: Path, episodes: list[dict]) -> dict[str, str]:
    """The files of the episodes' screenshots that are there, in base64 by their names."""
    names = {shot for e in episodes for shot in [e.get("final_shot"), *(s["shot"] for s in e["steps"])]}
    return {name: base64.b64encode((folder / name).read_bytes()).decode()
            for name in names - {None} if (folder / name).is_file()}
