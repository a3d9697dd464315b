"""Listeners to the phases of a run."""


def by_layer(call):
    """A listener that calls with the record of each layer that was compressed, how many are done, and of how many."""

    def listener(step):
        if step.layer is not None:
            call(step.layer, step.done, step.total)

    return listener
