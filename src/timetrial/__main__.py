"""`python -m timetrial`."""

from timetrial.cli import main

if __name__ == "__main__":
    main()
