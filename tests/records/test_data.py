"""Stage 2's index: a row is only ever read with the plan that it was written for."""

from pathlib import Path

import numpy as np
import pytest

from bench.annotate import make_data
from records import examples
from records.recordings import Quarantine
from records.trajectories import TrajectoryFiles
from runtime import UserError

ACTS = examples.Examples(texts=None, target=None)            # every record with something to do


class Inputs:
    """All that the index needs of a model: how large it sees a screenshot."""
    cell = 28
    resized = staticmethod(lambda width, height: (width, height))


def test_an_index_is_of_one_set_of_plans_in_one_order(tmp_path):
    meta, file = str(make_data(tmp_path / "d", 3, 2)), tmp_path / "index.npy"
    plans = {t.id: f"plan of {t.id}" for t in TrajectoryFiles(meta, Quarantine())}
    examples.write_index(file, ACTS, meta, plans, Inputs(), Quarantine())
    assert examples.read_index(file, plans)[:, examples.PLAN].tolist() == [0, 0, 1, 1, 2, 2]
    for others in (dict(reversed(plans.items())), {}, plans | {next(iter(plans)): "another"}):
        with pytest.raises(UserError, match="index.npy was made with other decompositions"):
            examples.read_index(file, others)
    Path(file).unlink()  # written again, it is of the new ones
    examples.write_index(file, ACTS, meta, {}, Inputs(), Quarantine())
    assert np.all(examples.read_index(file, {})[:, examples.PLAN] == -1)
