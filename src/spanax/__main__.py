"""`python -m spanax`: the command line without the console script."""

from spanax.cli import main

main()
