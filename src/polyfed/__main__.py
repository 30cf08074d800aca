"""`python -m polyfed` does the same as the command `polyfed`; use it if this command is not on the PATH."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
