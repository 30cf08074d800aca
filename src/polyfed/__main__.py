"""`python -m polyfed` runs the command line, for when the `polyfed` script is not on the PATH."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
