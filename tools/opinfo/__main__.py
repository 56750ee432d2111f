"""``python -m tools.opinfo``: torch's own operator tests over both routes, forward only."""

from tools.opinfo.sweep import main

if __name__ == "__main__":
    main()
