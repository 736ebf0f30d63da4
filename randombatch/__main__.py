"""`python -m randombatch` is the command `randombatch`."""

from randombatch.cli import main

main()
