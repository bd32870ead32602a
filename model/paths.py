"""What a path means that names a checkpoint or an adapter: the thing itself, or the run that made it.

A stage-2 run writes RUN/checkpoints/N while it trains (sharded, with the optimizer, beside it config.json and
tokenizer) and RUN/hf when it has ended; a stage-3 run writes RUN/checkpoints/N/ROLE, PEFT adapters.
Every option that takes one of these takes RUN, RUN/checkpoints or one of its numbers as well: `find_model`
and `find_adapters` name the newest state that is complete, or say in one line what lies there instead.
"""

import contextlib
import dataclasses
import json
import pickle
import warnings
from pathlib import Path

from runtime import UserError, World, latest_checkpoint, need_directory

EMPTY = "that directory is empty"


# ---------------------------------------------------------------------------------------------------- finding
def find_model(given: str, option: str) -> str:
    """The model directory that `given` names: itself, RUN/hf, or the newest numbered checkpoint."""
    for place in (Path(given), Path(given, "hf"), *numbered(given)):
        if "model_type" in settings_of(place):
            return given if place == Path(given) else str(place)
    raise UserError(f"{option} {given}: {what_is_there(given)}; give the directory of a Qwen2.5-VL "
                    f"checkpoint or of the stage-2 run that made it")


def find_adapters(given: str, roles: list[str], option: str = "--adapters") -> str:
    """The directory that holds an adapter of each of the roles: itself or the newest numbered checkpoint."""
    for place in (Path(given), *numbered(given)):
        if all((place / role / "adapter_config.json").is_file() for role in roles):
            return given if place == Path(given) else str(place)
    raise UserError(f"{option} {given}: no checkpoint of the {' and the '.join(roles)} there, but "
                    f"{what_is_there(given)}; give the run directory of grpo_hier.py (of one without a plan, "
                    f"with --use_plan false)")


def with_models(cfg, *fields: str):
    """The settings with what `find_model` finds for each of the fields that is not empty: what is written
    down is what was used, and a run that goes on cannot go on with a newer one."""
    return dataclasses.replace(cfg, **{f: find_model(getattr(cfg, f), f"--{f}") for f in fields
                                       if getattr(cfg, f)})


def need_room(out: str) -> None:
    """UserError where a model is to be written and anything else than a model lies: it would be replaced."""
    need_directory(out, f"--out {out}")
    if Path(out).exists() and "model_type" not in settings_of(Path(out)) and what_is_there(out) != EMPTY:
        raise UserError(f"--out {out}: {what_is_there(out)}, which would be lost; give another directory")


def numbered(given) -> list[Path]:
    """The newest numbered checkpoint of a run, or of a `checkpoints` directory."""
    return [newest for directory in (Path(given, "checkpoints"), Path(given))
            if (newest := latest_checkpoint(directory))]


def settings_of(directory: Path) -> dict:
    """The JSON object in a directory's config.json; {} where there is none."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def what_is_there(given) -> str:
    """In a few words, for somebody who meant something else."""
    path = Path(given)
    if not path.is_dir():
        return "that is a file" if path.exists() else "there is no such directory"
    names = sorted(p.name for p in path.iterdir())
    if "adapter_config.json" in names:
        return "that is the adapter of one role"
    if adapters := [n for n in names if (path / n / "adapter_config.json").is_file()]:
        return f"that is a checkpoint of stage 3 (adapters of {', '.join(adapters)})"
    run = settings_of(path)
    stage = 2 if "max_length" in run else 3 if "passes" in run else 4 if "max_missing" in run else 0
    if stage:
        newest = latest_checkpoint(path / "checkpoints")
        state = f"with checkpoint {newest.name}" if newest else "without a checkpoint"
        return f"that is a run of stage {stage}" + (f" {state}" if stage < 4 else "")
    if "model_type" in run:
        return f"that is a {run['model_type']} model"
    listed = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
    return f"that directory holds {listed}" if names else EMPTY


# ---------------------------------------------------------------------------------------------------- reading
def read_adapter(directory) -> tuple[dict, dict]:
    """(tensors by name, adapter_config.json) of an adapter; UserError for one that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    file = Path(directory) / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"adapter {directory}: no adapter_model.safetensors there, "
                        f"{what_is_there(directory)}; give a directory that stage 3 wrote")
    try:
        return load_file(file), json.loads(file.with_name("adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as e:
        raise UserError(f"adapter {directory} cannot be read ({e}); give another checkpoint") from None


def need_finite(tensors: dict, whose: str, remedy: str) -> None:
    """UserError where a number is NaN or infinite: whatever is computed with it is, too."""
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"{whose} cannot work: {len(bad)} of its {len(tensors)} tensors hold NaN or infinite "
                        f"numbers ({bad[0]}, ...); {remedy}")


def is_sharded(directory) -> bool:
    """Whether a directory holds a training state of stage 2, as torch.distributed writes it."""
    return (Path(directory) / ".metadata").is_file()


def read_sharded(directory) -> dict:
    """The model's weights out of a training state of stage 2, whole, by the model's own names."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    with complete(directory):
        known = FileSystemReader(directory).read_metadata().state_dict_metadata
    weights = {name.removeprefix("model."): torch.empty(about.size, dtype=about.properties.dtype)
               for name, about in known.items() if name.startswith("model.")}
    load_sharded({"model": weights}, directory)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def load_sharded(state: dict, directory, world: World = World()) -> None:
    """Fill the tensors of `state` from a training state of stage 2."""
    import torch.distributed.checkpoint as dcp
    with complete(directory):
        dcp.load(state, checkpoint_id=directory, no_dist=alone(world))


@contextlib.contextmanager
def complete(directory):
    """UserError where files of a training state are missing, cut or of another model."""
    from torch.distributed.checkpoint import CheckpointException
    try:
        yield
    except (CheckpointException, OSError, EOFError, ValueError, pickle.UnpicklingError) as e:
        said = str(e).strip().splitlines() or [type(e).__name__]
        raise UserError(f"checkpoint {directory}: its weights cannot be read ({said[-1].strip()[:200]}); "
                        f"give another one, or remove it and the run goes on from the one before") from e


def alone(world: World = World()) -> bool:
    """Whether a process saves and loads by itself. Torch warns of that even where it is told so: no news."""
    if world.size == 1:
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable|uninit)", UserWarning)
    return world.size == 1
