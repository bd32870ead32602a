"""`python -m sites.webarena check --tasks FILE --sites FILE`: what is in a task file, and what is wrong."""

from runtime import launch
from sites.webarena.check import check

if __name__ == "__main__":
    launch(check, check)
