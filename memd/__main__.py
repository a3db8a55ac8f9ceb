"""`python -m memd`, as an embedded daemon is started."""

from memd.cli import main

if __name__ == "__main__":
    main()
