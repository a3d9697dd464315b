"""The command `methods`."""

from __future__ import annotations

from typing import Annotated

import typer

from hasslefree.cli.common import COMPRESS, Json, app, show


@app.command(rich_help_panel=COMPRESS)
def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="List the settings of this method, pruner or low-rank solver instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List methods, pruners, low-rank solvers, patterns and efforts."""
    from hasslefree.recipe import listing

    if name is None:
        show(listing.to_dict(), None, as_json, listing.listing())
    else:
        show(listing.settings_dict(name), None, as_json, listing.settings_listing(name))
