"""runtime.py: what a command line becomes, what an error says, and files that a kill cannot spoil."""

import dataclasses
import errno
import json
import os
import sys

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
    ([], "required: --path"), (["--path", "x", "--m", "1"], "unrecognized arguments: --m"),
    (["--path", "x", "--rat", "1"], "unrecognized arguments: --rat"),
    (["--path", "x", "--n", "many"], "invalid int"),
    (["--path", "x", "--wide", "yes"], "neither true nor false")])
def test_a_wrong_command_line_ends_with_2_and_says_what(argv, said, capsys):
    with pytest.raises(SystemExit) as e:
        parse_args(Config, argv, "p", "none")
    assert e.value.code == 2 and said in capsys.readouterr().err


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
    open_run(run, Config("x"), free=("n",))
    open_run(run, Config("x", n=9), free=("n",))
    with pytest.raises(UserError, match=r"other settings \(rate\)"):
        open_run(run, Config("x", rate=1.0), free=("n",))


def test_one_process_at_a_time(tmp_path):
    with only_process(tmp_path / "f"):
        with pytest.raises(UserError, match="another process"), only_process(tmp_path / "f"):
            raise AssertionError("both are in")
    with only_process(tmp_path / "f"):
        assert (tmp_path / "f.lock").exists()


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


def test_directories_and_files_are_complete_or_not_there(tmp_path):
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
    real, runtime.os.replace = os.replace, no_rename
    try:
        with pytest.raises(OSError):
            write_atomic(tmp_path / "f", "half")
    finally:
        runtime.os.replace = real
    assert (tmp_path / "f").read_text() == "[1]"
