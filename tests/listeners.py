"""Listeners to the phases of a run, and a port to listen at."""

import socket


def by_layer(call):
    """A listener that calls with the record of each layer that was compressed, how many are done, and of how many."""

    def listener(step):
        if step.layer is not None:
            call(step.layer, step.done, step.total)

    return listener


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
