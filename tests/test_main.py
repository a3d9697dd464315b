"""Ctrl-C, SIGTERM and the end of a terminal: each ends a command once, in order, with 128 + the signal."""

import signal
import subprocess
import sys

import pytest

# A command line in the place of hasslefree's own, of which only the way to end is used.
PROGRAM = """
import sys, time, types

def run_app():
    try:
        print("works", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("tidies", flush=True)
        time.sleep(1)
        print("tidy", flush=True)
        sys.exit(130)

sys.modules["hasslefree.cli"] = types.SimpleNamespace(run_app=run_app)
from hasslefree.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_and_a_second_one_does_not_disturb_its_end(number):
    # The tests may run in the background, where shells ignore Ctrl-C.
    heard = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n{PROGRAM}"
    process = subprocess.Popen([sys.executable, "-c", heard], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "works\n"
    process.send_signal(number)
    assert process.stdout.readline() == "tidies\n"
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("tidy\n", "")
    assert process.returncode == 128 + number


def test_a_signal_that_was_ignored_before_stays_ignored():
    """As `nohup` has it."""
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM.replace("60", "1")
    process = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "works\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0
