"""`python -m polyfed`: the command line, where the script is not on the path."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
