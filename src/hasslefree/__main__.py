"""The command `hasslefree`, and `python -m hasslefree`: nothing is imported before an interruption can be reported."""

import signal
import sys


def main() -> None:
    """Run the command line. SIGTERM, which schedulers send, is treated as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from hasslefree.cli import run_app
    except KeyboardInterrupt:
        print("Interrupted before anything was written.", file=sys.stderr)
        sys.exit(130)
    run_app()


if __name__ == "__main__":
    main()
