"""`python -m polyfed.cli`, which does the same as `polyfed`."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
