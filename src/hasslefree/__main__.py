"""The command `hasslefree`, and `python -m hasslefree`: nothing is imported before an interruption
can be reported.
"""

import signal
import sys
from typing import Any

# Ctrl-C, what schedulers send, and the end of a terminal, which Windows does not have.
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
received = [signal.SIGINT]


def interrupt(number: int, _frame: Any) -> None:
    """Raise a KeyboardInterrupt, unless one is being handled: the clean-up is not interrupted."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    if error is None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt


def repeat(dropped: Any) -> None:
    """Interrupt again if Python drops the exception, as in destructors and Numba's callbacks."""
    if dropped.exc_type is KeyboardInterrupt:
        from threading import Timer

        Timer(0.05, signal.raise_signal, [received[-1]]).start()
    else:
        sys.__unraisablehook__(dropped)


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP are treated as Ctrl-C; the exit code is 128 + the
    signal.
    """
    for number in SIGNALS:
        # nohup, and shells for jobs in the background, ignore some of them.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    sys.unraisablehook = repeat
    try:
        from hasslefree.cli import run_app

        run_app()
    except KeyboardInterrupt:
        print("Interrupted before anything was written.", file=sys.stderr)
        sys.exit(128 + received[-1])
    except SystemExit as end:
        if end.code == 130:  # a command was interrupted
            sys.exit(128 + received[-1])
        raise
    finally:
        # Nothing is left to clean up: from now on a signal ends the process.
        for number in SIGNALS:
            if signal.getsignal(number) == interrupt:
                signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
