"""What a user is told: one line that names the thing and the remedy."""

import errno
import re
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


NO_SUCH_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)  # of a path


class UserError(Exception):
    """Something the user can mend: printed as one line that names the thing and the remedy; exit code 2."""


def remedy(error: Exception) -> str:
    """What to tell a user about an error, in one line with the way out; "" for one that is a bug."""
    if isinstance(error, UserError):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return (f"the GPU's memory is full ({str(error).splitlines()[0][:120]}): lower --max_batch (answers "
                f"at once), --micro_batch (stage 3) or --row_tokens (stage 2, or use more GPUs); the same "
                f"command goes on where it stopped")
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or re.search("No space left|file write failed|unexpected pos", str(error)):  # torch's, too
        where = getattr(error, "filename", None) or "the run directory"
        return (f"no space left on the disk for {where}: make room (old runs/), then the same command goes "
                f"on where it stopped")
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: run ./setup.sh, then `source .venv/bin/activate`"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {error.filename or 'a file'}: give a place of your own (--run_dir, --out)"
    if isinstance(error, OSError) and error.errno in NO_SUCH_KIND and error.filename:
        return f"{error.filename2 or error.filename}: {error.strerror}; give another path"
    return ""


def describe(error: BaseException) -> str:
    """A traceback as text, for artefacts."""
    return "".join(traceback.format_exception(error)).strip()
