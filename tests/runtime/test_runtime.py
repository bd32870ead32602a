"""runtime.py: what a command line becomes, what an error says, and files that a kill cannot spoil."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

import grpo_hier
import runtime
import sft
from runtime import (
    UserError,
    append_jsonl,
    atomic_directory,
    drop_old_checkpoints,
    latest_checkpoint,
    launch,
    only_process,
    open_run,
    parse_args,
    process_group,
    read_jsonl,
    remedy,
    rewrite_jsonl,
    write_atomic,
)


@dataclasses.dataclass(frozen=True)
class Config:
    path: str                            # a file
    run: str = "runs/{path}"             # where to
    n: int = 3                           # how many, 50 % of them
    rate: float = 0.5                    # how fast
    wide: bool = True                    # whether


def test_a_command_line_becomes_a_config():
    cfg = parse_args(Config, ["--path", "x", "--n", "7", "--wide", "false"], "p", "none")
    assert cfg == Config("x", "runs/x", 7, 0.5, False)


@pytest.mark.parametrize("argv, said", [
    ([], "required: --path"), (["--path", "x", "--zz", "1"], "--zz is no option: --help shows all"),
    (["--path", "x", "--rat", "1"], "--rat is no option: did you mean --rate?"),
    (["--path", "x", "--rat=1", "--Wide-", "true"], "--Wide- is no option: did you mean --wide?"),
    (["--path", "x", "--N", "1"], "--N is no option: did you mean --n?"),
    (["--path", "x", "--pre-set", "demo"], "--pre-set is no option: did you mean --preset?"),
    (["--path", "x", "word"], "word: no words without an option are taken here"),
    (["--path", "x", "--n", "many"], "invalid int"),
    (["--path", "x", "--wide", "yes"], "neither true nor false")])
def test_a_wrong_command_line_is_one_line_that_says_what(argv, said, capsys, monkeypatch):
    with pytest.raises(UserError, match=re.escape(said)):
        parse_args(Config, argv, "p", "none")

    def main(cfg: Config):
        raise AssertionError("it ran")
    monkeypatch.setattr(sys, "argv", ["stage.py", *argv])
    with pytest.raises(SystemExit) as e:
        launch(main)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("stage.py: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("argv, said", [
    (["one", "x"], "path='x'"), (["one", "x", "y,z", "--n", "7", "w"], "path='x,y,z,w'"),
    (["two", "x", "--n", "7", "y"], "path='x', run='y', n=7"), (["two", "x"], "x: 2 words"),
    (["two", "x", "y", "z"], "x y z: 2 words"), (["two", "x", "y", "--run", "z"], "--run is given already"),
    (["three", "--path", "x"], "three is no subcommand: there are one, two"),
    (["tow", "--path", "x"], "tow is no subcommand: did you mean two?")])
def test_words_without_an_option(argv, said, capsys, monkeypatch):
    def one(cfg: Config):
        print(cfg)

    def two(cfg: Config):
        print(cfg)
    monkeypatch.setattr(sys, "argv", ["stage.py", *argv])
    with pytest.raises(SystemExit):
        launch(lambda cfg: None, one, two, words={"one": ("path",), "two": ("path", "run")})
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("Config", [sft.Config, grpo_hier.Config])
def test_torchrun_takes_no_flag_of_a_stage_for_an_abbreviation_of_its_own(Config):
    flags = [f"--{f.name}" for f in dataclasses.fields(Config)]
    args = get_args_parser().parse_args(["stage.py", *flags])
    assert args.training_script == "stage.py" and args.training_script_args == flags


def test_help_shows_every_comment_and_default(capsys):
    with pytest.raises(SystemExit):
        parse_args(Config, ["--help"], "p", "none")
    text = " ".join(capsys.readouterr().out.split())
    assert "how many, 50 % of them (default 3)" in text and "a file (required)" in text


def test_presets_are_read_in_order_and_flags_win(tmp_path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('[s]\npath = "a"\nn = 5\n[s.run.here]\nrate = 2.0\n')
    two.write_text("[s]\nn = 6\n")
    args = ["--preset", str(one), "--preset", str(two)]
    assert parse_args(Config, args, "p", "s") == Config("a", "runs/a", 6)
    assert parse_args(Config, [*args, "--n", "8"], "p", "s").n == 8
    assert parse_args(Config, [*args, "--run", "here"], "p", "s").rate == 2.0
    two.write_text("[s]\nm = 6\n")
    with pytest.raises(UserError, match="sets m, which Config does not have"):
        parse_args(Config, args, "p", "s")
    with pytest.raises(UserError, match="preset nosuch: no file .* demo, smoke"):
        parse_args(Config, ["--preset", "nosuch"], "p", "s")
    two.write_text("[s]\nn = six\n")
    with pytest.raises(UserError, match=r"two.toml: no TOML: .*line 2"):
        parse_args(Config, args, "p", "s")


@pytest.mark.parametrize("flags, said", [([], "done"), (["--dry_run"], "would"),
                                         (["--dry_run=true"], "would"), (["--dry_run", "false"], "done")])
def test_a_dry_run_is_a_flag_like_others(flags, said, capsys, monkeypatch):
    def main(cfg: Config):
        print("done", cfg.path)

    def dry_run(cfg: Config):
        print("would", cfg.path)
    monkeypatch.setattr(sys, "argv", ["stage.py", *flags, "--path", "x"])
    with pytest.raises(SystemExit) as e:
        launch(main, dry_run=dry_run)
    assert e.value.code == 0 and capsys.readouterr().out == f"{said} x\n"
    monkeypatch.setattr(sys, "argv", ["stage.py", "--help"])
    with pytest.raises(SystemExit):
        launch(main, dry_run=dry_run)
    assert "--dry_run" in capsys.readouterr().out


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


@pytest.mark.parametrize("error, words", [
    (UserError("the thing; the way out"), "the thing; the way out"),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "--micro_batch (stage 3)"),
    (ModuleNotFoundError("No module named 'peft'"), "run ./setup.sh"),
    (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "make room"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x/log.jsonl"), "disk for runs/x/log.jsonl"),
    (PermissionError(errno.EACCES, "Permission denied", "runs"), "no permission for runs"),
    (ValueError("a bug"), ""), (FileNotFoundError(errno.ENOENT, "gone", "f"), "")])
def test_errors_that_a_user_can_mend_are_one_line(error, words, capsys, monkeypatch):
    assert words in remedy(error) and bool(words) == bool(remedy(error))

    def main(cfg: Config):
        raise error
    monkeypatch.setattr(sys, "argv", ["stage.py", "--path", "x"])
    with pytest.raises(SystemExit if words else type(error)) as e:
        launch(main)
    if words:
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.startswith("stage.py: ") and err.count("\n") == 1 and words in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("write", [
    lambda: torch.save({"x": torch.zeros(100_000)}, "/dev/full"),
    lambda: append_jsonl("/dev/full", [{"a": 1}])])
def test_a_full_disk_is_said_whoever_meets_it(write):
    with pytest.raises(Exception) as e:
        write()
    assert "no space left on the disk" in remedy(e.value), repr(e.value)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 has no GPU: torch sees 2 here; give --nproc_per_node=2"):
        with process_group():
            pass


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch):
    def main(cfg: Config):
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "argv", ["stage.py", "--path", "x"])
    with pytest.raises(SystemExit) as e:
        launch(main)
    assert e.value.code == 130 and "goes on from where it stopped" in capsys.readouterr().err


def test_a_run_directory_belongs_to_one_set_of_settings(tmp_path):
    run = str(tmp_path / "run")

    def enter(cfg):
        with open_run(run, cfg, free=("n",)) as path:
            assert path == Path(run)
    enter(Config("x"))
    enter(Config("x", n=9))
    with pytest.raises(UserError, match=r"other settings \(rate\)"):
        enter(Config("x", rate=1.0))
    for text, said in (("[]", "no JSON object"), ('{"a": ', "config.json"), ("{}", "other settings")):
        Path(run, "config.json").write_text(text)
        with pytest.raises(UserError, match=said):
            enter(Config("x"))
    (tmp_path / "file").touch()
    run = str(tmp_path / "file")
    with pytest.raises(UserError, match="can be made"):
        enter(Config("x"))


@pytest.mark.parametrize("name", ["f", "directory"])
def test_one_process_at_a_time(tmp_path, name):
    (tmp_path / "directory").mkdir()
    me = f"{tmp_path / name} is held by another run, process {os.getpid()} on {socket.gethostname()};"
    for _ in range(2):
        with only_process(tmp_path / name):
            with pytest.raises(UserError, match=re.escape(me)), only_process(tmp_path / name):
                raise AssertionError("both are in")
    with pytest.raises(RuntimeError), only_process(tmp_path / name):
        raise RuntimeError("it ends badly")
    with only_process(tmp_path / name):
        assert {p.name for p in tmp_path.rglob("*")} == {"directory", "f.lock" if name == "f" else ".lock"}


HOLD = """
import multiprocessing, os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from runtime import only_process
with only_process(Path({path!r})):
    def worker():
        print(os.getpid(), flush=True)            # it runs, so what happens at a fork has happened
        time.sleep(600)
    multiprocessing.get_context("fork").Process(target=worker).start()
    time.sleep(600)
"""


def test_a_killed_process_holds_nothing_and_its_workers_neither(tmp_path):
    code = HOLD.format(root=str(runtime.ROOT), path=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"process {process.pid} on"), only_process(tmp_path):
            raise AssertionError("both are in")
        process.kill()
        process.wait()
        os.kill(worker, 0)                        # it lives on
        with only_process(tmp_path):
            assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    finally:
        os.kill(worker, 9)
        process.stdout.close()


RANK = """
import sys
from dataclasses import dataclass
sys.path.insert(0, {root!r})
from runtime import launch, open_run, process_group
@dataclass
class Config:
    run_dir: str = ""  # where
def main(cfg: Config):
    with process_group() as world, open_run(cfg.run_dir, cfg, world) as run:
        print(world.rank, "is in", run)
launch(main)
"""


@pytest.mark.parametrize("held", [True, False])
def test_all_ranks_are_in_or_say_who_holds_the_directory(tmp_path, held):
    file, run = tmp_path / "rank.py", tmp_path / "run"
    file.write_text(RANK.format(root=str(runtime.ROOT)))
    run.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with only_process(run) if held else contextlib.nullcontext():
        ranks = [subprocess.Popen([sys.executable, str(file), "--run_dir", str(run)], text=True,
                                  env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE) for rank in (0, 1)]
        told = [rank.communicate(timeout=120) for rank in ranks]
    for n, (rank, (out, err)) in enumerate(zip(ranks, told)):
        if held:
            me = f"process {os.getpid()} on {socket.gethostname()}"
            assert (rank.returncode, out, err.count("\n")) == (2, "", 1), err
            assert err.startswith(f"rank.py: {run} is held by another run, {me};")
        else:
            assert (rank.returncode, out) == (0, f"{n} is in {run}\n"), err
    assert (run / "config.json").exists() == (not held)


def test_lines_survive_a_kill_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "log.jsonl"
    append_jsonl(file, [{"n": i} for i in range(3)])
    with open(file, "a") as f:
        f.write('{"n": 3')
    assert [o["n"] for o in read_jsonl(file)] == [0, 1, 2]
    assert [o["n"] for o in rewrite_jsonl(file, lambda o: o["n"] < 2)] == [0, 1]
    assert file.read_text() == '{"n": 0}\n{"n": 1}\n' and read_jsonl(tmp_path / "none") == []
    file.write_text('{"n": 0}\nhalf\n{"n": 1}\n')
    with pytest.raises(UserError, match=r"log.jsonl:2: not a JSON line"):
        read_jsonl(file)


def test_directories_and_files_are_complete_or_not_there(tmp_path, monkeypatch):
    for step in (1, 2, 10):
        with atomic_directory(tmp_path / f"{step:06d}") as tmp:
            (tmp / "x").write_text(str(step))
    with pytest.raises(RuntimeError, match="killed"), atomic_directory(tmp_path / "000011") as tmp:
        (tmp / "x").write_text("half")
        raise RuntimeError("killed")
    assert latest_checkpoint(tmp_path).name == "000010"
    drop_old_checkpoints(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["000002", "000010"]
    write_atomic(tmp_path / "f", json.dumps([1]))

    def no_rename(*_):
        raise OSError(errno.ENOSPC, "full")
    monkeypatch.setattr(os, "replace", no_rename)
    with pytest.raises(OSError):
        write_atomic(tmp_path / "f", "half")
    assert (tmp_path / "f").read_text() == "[1]"
