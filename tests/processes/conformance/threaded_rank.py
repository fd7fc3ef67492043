"""A rank whose import starts a thread that never ends, as some libraries do."""

import threading

from processes.conformance import rank_driver as driving

threading.Thread(target=threading.Event().wait).start()
main = driving.main

if __name__ == "__main__":
    main()
