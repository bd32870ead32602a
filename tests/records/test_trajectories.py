"""ScaleCUA's files -> records and trajectories: the published records, and every irregularity that is
documented."""

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from language.actions import Call
from records import recordings
from records.recordings import Quarantine, load_image, read_image, read_meta, read_records, trajectory_id
from records.trajectories import TrajectoryFiles, build_trajectories, load_decompositions
from runtime import UserError

SCALECUA = Path(__file__).resolve().parents[2].parent / "shared/data/scalecua"
needs_data = pytest.mark.skipif(not SCALECUA.exists(), reason="shared/data is absent")


def line(action, k=0, task="Buy it", folder="shop/one", operation=None, history=None, image=None, **more):
    """One record; step k has the history do 0 .. do k-1."""
    done = [f"do {i}" for i in range(k)] if history is None else history
    before = "\n".join(f'Step {i}: "{text}"' for i, text in enumerate(done, 1)) or "None"
    said = f"<operation>\n{operation or f'do {k}'}\n</operation>\n<action>\n{action}\n</action>"
    return {"image": image or f"{folder}/images/{k}.png", "width": 1000, "height": 500, "conversations": [
        {"from": "human", "value": f"<image>\nGo on.\n\nTask: {task}\n\nPrevious operations:\n{before}"},
        {"from": "gpt", "value": said}]} | more


def write(directory: Path, lines, name="d", **entry) -> Path:
    """A meta file beside an annotation file of these lines (dicts, or text as it is)."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}.jsonl"
    file.write_text("".join((o if isinstance(o, str) else json.dumps(o)) + "\n" for o in lines))
    meta = directory / f"{name}.meta.json"
    meta.write_text(json.dumps({name: {"root": "data", "annotation": file.name, "conv_style":
                                       "internvl2_5_web_navigation_v1", "repeat_time": 1} | entry}))
    return meta


def read(tmp_path, lines, **entry):
    """(records, trajectories by both ways, quarantine counts, reasons) of these lines."""
    meta = write(tmp_path, lines, **entry)
    quarantine = Quarantine(tmp_path / "q.jsonl")
    records = list(read_records(meta, Quarantine()))
    files = list(TrajectoryFiles(meta, quarantine))
    key = lambda t: (t.id, [r.where for r in t.steps])  # noqa: E731
    assert sorted(map(key, build_trajectories(records))) == sorted(map(key, files))
    file = tmp_path / "q.jsonl"
    reasons = [json.loads(o)["reason"] for o in file.read_text().splitlines()] if file.exists() else []
    return records, files, quarantine.counts, reasons


END = "terminate(status='success', info=None)"
WHOLE = [line("click(x=0.5, y=0.2)"), line("write(message='x')", 1), line(END, 2)]


# ------------------------------------------------------------------------------------------ published records
@needs_data
def test_the_two_published_records(tmp_path):
    meta, sample = tmp_path / "meta.json", str(SCALECUA / "sft/readme_sample.jsonl")
    meta.write_text(json.dumps({"real": {"root": "/data", "annotation": sample, "repeat_time": 1,
                                         "conv_style": "internvl2_5_mobile_planning_cot_v1"}}))
    first, second = read_records(meta)
    assert first.kind == second.kind == "step" and first.platform == "Android"
    assert first.instruction == "Could you check my reading progress for War and Peace?"
    assert first.history == [] and second.history == [first.operation]
    assert first.think.startswith("Based on the second")
    assert first.calls == (Call("open_app", {"app_name": "Cantook"}),)
    assert second.action(1092, 2352) == "click(x=401, y=2162)"
    assert first.image == Path("/data/android_lab_data_Cantook/cantook_5/images/home_screen.png")
    quarantine = Quarantine()
    (t,) = TrajectoryFiles(meta, quarantine)
    assert t.id == first.trajectory == second.trajectory
    assert quarantine.counts["trajectories without an end"] == 1
    assert t.described()[0][0].endswith("Harry Potter titles. [open_app(app_name='Cantook')]")
    assert t.described()[1] == (f"{second.operation} [click(x=0.3674, y=0.9192)]", second.image)


@needs_data
def test_the_documented_records():
    file = SCALECUA / "doc_records/cua_lite_documented_records.json"
    desktop, point, box, action = json.loads(file.read_text())
    entry = recordings.Entry("n", Path("/r"), Path("a"), 1, "Web")

    def parse(record):
        if "conversations" not in record:
            record = {"image": "a.png", "width": 1280, "height": 720, "conversations": [
                {"from": "human", "value": "<image>\n" + record.get("instruction", "Quick & Easy")},
                {"from": "gpt", "value": record["gpt_value"]}]}
        return recordings.parse_record(json.dumps(record), entry)
    assert parse(desktop).kind == "step"
    assert parse(desktop).calls == (Call("click", {"x": 0.0099, "y": 0.9833}),)
    assert parse(desktop).instruction == "Turn on get notifications in system settings."
    assert (parse(point).kind, parse(point).box, parse(point).calls) == ("point", (0.125, 0.261), ())
    assert (parse(box).kind, parse(box).box) == ("box", (0.125, 0.261, 0.199, 0.312))
    grounding = parse(action)
    assert grounding.kind == "grounding" and grounding.calls == (Call("click", {"x": 0.1624, "y": 0.2869}),)
    assert grounding.instruction == "Click on 'Quick & Easy' in the dropdown menu."


@needs_data
def test_published_meta_files(tmp_path):
    with pytest.raises(UserError, match="no annotation file .*path/to/the/jsonl/annotation"):
        read_meta(SCALECUA / "sft/train_meta.json")
    entries = json.loads((SCALECUA / "doc_records/meta_web_entries_typed.json").read_text())["entries"]
    (tmp_path / "a.jsonl").write_text("")
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({e["name"]: e | {"root": ".", "annotation": "a.jsonl"} for e in entries}))
    read = read_meta(meta)
    assert len(read) == len(entries) and {e.platform for e in read} == {"Web"}
    assert {e.repeat for e in read} >= {0.0, 0.2, 0.5, 1.0, 2.0}


# ------------------------------------------------------------------------------------------------- meta files
def test_meta_files(tmp_path):
    a = write(tmp_path, WHOLE, "a")
    b = write(tmp_path, WHOLE[:1], "b", conv_style="internvl2_5_ubuntu_navigation_v1")
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([a.name, str(b)]))
    assert [e.name for e in read_meta(listed)] == [e.name for e in read_meta(f"{a},{b}")] == ["a", "b"]
    assert [e.platform for e in read_meta([a, b])] == ["Web", "Linux"]
    for text, message in (("{", "meta.json"), ('{"x": 3}', "root and annotation"),
                          ("3", "root and annotation"),
                          ('{"x": {"root": "r", "annotation": "none"}}', "no annotation file")):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_meta(tmp_path / "meta.json")


@pytest.mark.parametrize("texts, platform", [
    (("internvl2_5_windows_planning_cot_v1",), "Windows"), (("internvl2_5_mac_navigation_v1",), "macOS"),
    (("", "data_20250328_ubuntu_navigation_20250401.jsonl"), "Linux"),
    (("internvl2_5_mobile_navigation_v1",), "Android"),
    (("internvl2_5_desktop_navigation_v1", "x.jsonl", "data/data_1/macos/images"), "macOS"),
    (("internvl2_5_ipad_grounding_v1",), "iOS"), (("a", "b"), "Other")])
def test_platforms(texts, platform):
    assert recordings._platform(*texts) == platform


@pytest.mark.parametrize("repeat, low, high", [
    (0, 0, 0), (1, 1000, 1000), (2, 2000, 2000), (0.2, 150, 250), ("random:20%", 150, 250),
    ("repeat:3", 3000, 3000), (1.5, 1400, 1600)])
def test_repeat_time(tmp_path, repeat, low, high):
    meta = write(tmp_path, [line("wait(1)", folder=f"f{i}") for i in range(1000)], repeat_time=repeat)
    first, second = ([r.where for r in read_records(meta)] for _ in range(2))
    assert first == second and low <= len(first) <= high
    assert len(list(read_records(meta, repeat=False))) == (1000 if repeat else 0)


# ---------------------------------------------------------------------------------------------------- records
@pytest.mark.parametrize("action, expected", [
    ("click(x=0.25, y=0.5)", "click(x=250, y=250)"),
    ("click(x = 0.25 , y = 0.5)", "click(x=250, y=250)"),
    ("click(x='0.25', y=' 0.5')", "click(x=250, y=250)"),
    ("click(x=1, y=1.0)", "click(x=999, y=499)"),
    ("click(x=0, y=0)", "click(x=0, y=0)"),
    ("click(x=0.9999, y=1)", "click(x=999, y=499)"),
    ("click(x=1.02, y=-0.01)", "click(x=999, y=0)"),
    ("moveTo(x=640, y=360)", "moveTo(x=640, y=360)"),
    ("swipe(from_coord=[0.5, 1.0], to_coord=(0.5, 0.1))", "swipe(from_coord=[500, 499], to_coord=[500, 50])"),
    ("swipe(direction='up', amount=0.7)", "swipe(direction='up', amount=0.7)"),
    ("write(message=8)", "write(message='8')"),
    ("write(message='max=0.3, y=0.3')", "write(message='max=0.3, y=0.3')"),
    ("wait(seconds='2')", "wait(seconds=2)"),
    ("press(keys=1)", "press(keys='1')"),
    ("hotkey(keys=['ctrl', 'a'])", "hotkey('ctrl', 'a')"),
    ("terminate(status='fail')", "terminate(status='failure')"),
    ("click(x=0.1, y=0.1, clicks=40)", "click(x=100, y=50, clicks=40)"),
    ("click(x=0.1, y=0.1)\nwrite(message='a')", "click(x=100, y=50)\nwrite(message='a')")])
def test_actions_of_records(tmp_path, action, expected):
    (record,) = read_records(write(tmp_path, [line(action)]))
    assert record.action(1000, 500) == expected and record.line == "do 0"


@pytest.mark.parametrize("bad, reason", [
    ("{", "not a JSON line"), ("[1]", "no image"), ({"image": 3}, "no image"),
    (line("wait(1)", image=["a.png", "b.png"]), "2 images"),
    (line("wait(1)", width=None), "no width"), (line("wait(1)", height=27), "28 pixels"),
    (line("wait(1)", width=float("inf")), "no width"), (line("wait(1)", width=10**400), "no width"),
    (line("wait(1)", conversations=[]), "not one question"),
    (line("wait(1)", conversations=5), "not one question"), ("[" * 100_000, "not a JSON line"),
    (line("wait(1)", task="\ud83d"), "surrogates"), (line("wait(1)", image="\ud83d.png"), "surrogates"),
    (line("wait(1)") | {"conversations": line("wait(1)")["conversations"] * 2}, "not one question"),
    (line("press()"), "keys is missing"), (line("click(x=0.3)"), "one is missing"),
    (line("scroll()"), "clicks is missing"), (line("fly()"), "unknown action fly"), (line(""), "no action"),
    (line("click(x=4000, y=20)"), "outside the 1000x500"),
    (line("click(x=1.5, y=0.2)"), "outside"), (line("wait(1)", task=""), "no task")])
def test_what_cannot_be_used_is_left_out_with_its_reason(tmp_path, bad, reason):
    meta = write(tmp_path, [line("wait(1)"), bad, line("wait(2)", 1)])
    file = tmp_path / "q" / "q.jsonl"
    (t,) = TrajectoryFiles(meta, Quarantine())
    assert len(t.steps) == 2
    for _ in range(2):  # the second run adds no second line
        quarantine = Quarantine(file)
        assert len(list(read_records(meta, quarantine))) == 2
        (left,) = [json.loads(o) for o in file.read_text().splitlines()]
        assert left["where"].endswith("d.jsonl:2") and reason in left["reason"]
        assert quarantine.counts["left out"] == 1


def test_other_forms_of_a_record(tmp_path):
    listed = line("wait(1)", image=["shop/one/images/0.png"])
    system = line("wait(1)")
    system["conversations"].insert(0, {"from": "system", "value": "You are."})
    evaluation = line("wait(1)")
    evaluation["conversations"][0]["value"] = ("<image>\nGo on.\n\nTask:\nBuy it\n\nPrevious operations:\n"
                                               'Step 1: say "hi"\n')
    bare = line("wait(1)")
    bare["conversations"][0]["value"] = "<image>\nTask: Buy it"
    one, two, three, four = read_records(write(tmp_path, [listed, system, evaluation, bare]))
    assert one.image == two.image and one.trajectory == two.trajectory == three.trajectory
    assert three.history == ['say "hi"'] and three.instruction == "Buy it"
    assert four.kind == "step_no_history" and four.history == [] and four.instruction == "Buy it"


def test_history_lines_of_several_lines(tmp_path):
    (record,) = read_records(write(tmp_path, [line("wait(1)", history=['type "a"\nthen go', "Step 3: no"])]))
    assert record.history == ['type "a"\nthen go', "Step 3: no"]


# ----------------------------------------------------------------------------------------------- trajectories
def test_a_whole_trajectory(tmp_path):
    records, (t,), counts, reasons = read(tmp_path, WHOLE)
    assert t.id == records[0].trajectory == trajectory_id("Buy it", Path("/x/shop/one/images/0.png"))
    assert t.id.startswith("shop/one#") and (t.instruction, t.platform) == ("Buy it", "Web")
    assert t.described() == [("do 0 [click(x=0.5, y=0.2)]", records[0].image),
                             ("do 1 [write(message='x')]", records[1].image),
                             ("do 2 [terminate(status='success', info=None)]", records[2].image)]
    assert not reasons and not +counts


def test_interleaved_and_shuffled_trajectories(tmp_path):
    lines = [line(END if k == 4 else "wait(1)", k, folder=f"f{i}", task=f"t{i % 3}")
             for k in range(5) for i in range(20)]
    random.Random(0).shuffle(lines)
    _, files, counts, reasons = read(tmp_path, lines)
    assert len(files) == 20 and not reasons and not +counts
    assert all([len(r.history) for r in t.steps] == list(range(5)) for t in files)


def test_gaps_are_filled_from_the_history(tmp_path):
    _, (t,), counts, reasons = read(tmp_path, [WHOLE[0], "{broken", WHOLE[2]])
    assert [words for words, _ in t.described()][1] == "do 1" and t.described()[1][1] is None
    assert counts["missing steps"] == 1 and len(reasons) == 1
    _, (t,), counts, reasons = read(tmp_path / "b", [WHOLE[0], line("press()", 1), WHOLE[2]])
    assert counts["missing steps"] == 1 and "keys is missing" in reasons[0]


def test_no_first_step_no_trajectory(tmp_path):
    _, files, counts, reasons = read(tmp_path, WHOLE[1:])
    assert not files and reasons == ["its trajectory has no first step"] * 2


def test_duplicates(tmp_path):
    _, (t,), counts, _ = read(tmp_path, [*WHOLE, *WHOLE])
    assert len(t.steps) == 3 and counts["the same step twice"] == 3
    other = line("write(message='y')", 1, image="shop/one/images/1b.png")
    _, (t,), counts, _ = read(tmp_path / "b", [*WHOLE, other])
    assert t.steps[1].calls[0].args["message"] == "x" and counts["another action at the same step"] == 1


def test_two_runs_of_a_task_in_one_directory(tmp_path):
    def run(name, words):
        return [line(END if k == 2 else "wait(1)", k, operation=words[k], history=words[:k],
                     image=f"shop/one/images/{name}{k}.png") for k in range(3)]
    a, b = run("a", ["open", "look", "end"]), run("b", ["search", "sort", "end"])
    _, files, counts, reasons = read(tmp_path, [a[0], b[0], b[1], a[1], b[2], a[2]])
    assert [[r.image.name[0] for r in t.steps] for t in files] == [["a"] * 3, ["b"] * 3] and not reasons
    assert [t.id for t in files] == [files[0].id, files[0].id + "~2"]
    assert counts["another run in the same directory"] == 1


def test_one_task_under_two_roots_of_one_name(tmp_path):
    both = [line(o, k, image=f"{root}/web/site/{k}.png") for root in ("a", "b")
            for k, o in enumerate(["wait(1)", "wait(2)", END]) if (root, k) != ("a", 1)]
    _, files, counts, reasons = read(tmp_path, both)
    assert [[r.image.parts[-4] for r in t.steps] for t in files] == [["a"] * 2, ["b"] * 3]
    assert files[1].id == files[0].id + "~2" and counts["missing steps"] == 1 and not reasons


def test_steps_after_the_end_and_no_end(tmp_path):
    _, (t,), counts, _ = read(tmp_path, [*WHOLE, line("wait(1)", 3), line("wait(1)", 4)])
    assert len(t.steps) == 3 and counts["steps after the end"] == 2
    answered = [line("response(answer='4')"), line("wait(1)", 1), line(END, 2)]
    _, (t,), counts, _ = read(tmp_path / "b", answered)
    assert len(t.steps) == 3 and not +counts
    _, (t,), counts, _ = read(tmp_path / "c", WHOLE[:2])
    assert counts["trajectories without an end"] == 1


def test_records_without_a_history_are_no_trajectories(tmp_path):
    bare = line("wait(1)")
    bare["conversations"][0]["value"] = "<image>\nTask: Buy it"
    lines = [bare, *(line("wait(1)", image=f"a/images/{i}.png") for i in range(3))]
    records, files, counts, reasons = read(tmp_path, lines)
    assert len(records) == 4 and not files and len(reasons) == 3 and "does not end" in reasons[0]
    assert counts["records without a history"] == 1


def test_skipped_data_sets_give_no_trajectories(tmp_path):
    assert len(TrajectoryFiles(write(tmp_path, WHOLE, repeat_time=0), Quarantine())) == 0
    assert list(TrajectoryFiles(write(tmp_path, WHOLE, repeat_time=0), Quarantine())) == []
    assert len(list(TrajectoryFiles(write(tmp_path, WHOLE, repeat_time=0.1), Quarantine()))) == 1


# --------------------------------------------------------------------------------------------------- the rest
def test_images(tmp_path):
    Image.new("RGBA", (50, 40)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").mode == "RGB"
    noise = Image.frombytes("RGB", (200, 200), random.Random(0).randbytes(120000))
    for kind in ("png", "jpg", "webp"):
        whole, cut = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
        noise.save(whole)
        assert read_image(whole) == (whole.read_bytes(), (200, 200)) and load_image(whole).size == (200, 200)
        cut.write_bytes(whole.read_bytes()[:-1000])
    (tmp_path / "b.txt").write_text("no image")
    (tmp_path / "b.gif").write_bytes(b"")
    for name in ("b.png", "b.jpg", "b.webp", "b.txt", "b.gif", "none.png"):
        for read in (load_image, read_image):
            with pytest.raises(ValueError, match=name):
                read(tmp_path / name)


def test_decompositions(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"id": "a", "subtasks": [{"title": "t", "goal": "g"}]}) + "\n")
    assert load_decompositions(file) == {"a": [("t", "g")]}
    with pytest.raises(UserError, match="annotate.py"):
        load_decompositions(tmp_path / "none.jsonl")
