"""What a program needs around its mathematics, and nothing of what it computes.

    command.py      a dataclass of settings -> a command line; every program ends with `launch`; begin here
    run.py          run directories: one process, one set of settings
    process.py      ranks of torchrun, and what they tell each other
    files.py        files that a kill cannot spoil
    checkpoints.py  the state of a training run;  batches.py  the order of its rollout batches
    stopwatch.py    where the time of a rollout batch goes
    systems.py      systems, found by name
    errors.py       what a user is told
"""

from runtime.command import (  # noqa: F401
    Parser,
    config_class,
    did_you_mean,
    field_comments,
    launch,
    left_over,
    parse_args,
    read_preset,
)
from runtime.errors import (  # noqa: F401
    NO_SUCH_KIND,
    ROOT,
    UserError,
    describe,
    remedy,
)
from runtime.files import (  # noqa: F401
    append_jsonl,
    atomic_directory,
    drop_old_checkpoints,
    each_jsonl,
    latest_checkpoint,
    need_directory,
    new_file,
    read_json,
    read_jsonl,
    rewrite_jsonl,
    write_atomic,
)
from runtime.process import (  # noqa: F401
    World,
    all_reduce_flat_,
    gather_objects,
    process_group,
)
from runtime.run import (  # noqa: F401
    DTYPES,
    check,
    code_version,
    need_directories,
    only_process,
    open_run,
    read_settings,
    settle_config,
)
