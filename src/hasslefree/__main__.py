"""`python -m hasslefree` is the command `hasslefree`."""

from hasslefree.cli import main

main()
