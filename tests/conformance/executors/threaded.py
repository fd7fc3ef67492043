"""A rank whose import starts a thread, as some libraries do."""

import threading

from conformance.executors import driving

threading.Thread(target=threading.Event().wait, daemon=True).start()
main = driving.main

if __name__ == "__main__":
    main()
