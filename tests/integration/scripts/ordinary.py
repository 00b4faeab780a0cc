"""How an ordinary script may look at itself, and how it may end. It needs no package."""

import atexit
import multiprocessing
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass


@dataclass
class Point:
    """Of this module, to be found by another process."""

    x: int


def double(point):
    return Point(2 * point.x)


def facts():
    names = ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__annotations__")
    for name in names:
        print(name, repr(globals()[name]))
    print("__spec__", __spec__ and (__spec__.name, __spec__.origin, __spec__.loader is __loader__))
    print(type(__loader__).__name__, getattr(__loader__, "path", None), getattr(__loader__, "name", None))
    print(__builtins__ is sys.modules["builtins"], sys.modules["__main__"].__dict__ is globals())
    print(sys.argv, sys.path, sys.flags.safe_path)
    print(pickle.loads(pickle.dumps(Point(3))))


def spawn():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.map(double, [Point(1), Point(2)]))


def thread():
    def work():
        time.sleep(0.2)
        print("the thread is done")

    atexit.register(print, "atexit")
    threading.Thread(target=work).start()


def fork():
    child = os.fork()
    if child == 0:
        sys.exit(5)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def hook():
    sys.excepthook = lambda kind, error, traceback: print("hook", kind, error, traceback.tb_frame.f_code.co_name)
    raise KeyError("for the hook")


def chain():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        raise RuntimeError("after that") from error


def raise_():
    raise KeyError("a key")


def interrupt():
    raise KeyboardInterrupt


def main(how):
    if how.isdigit():
        sys.exit(int(how))
    elif how == "none":
        sys.exit()
    elif how == "text":
        sys.exit("a text instead of a number")
    elif how == "os._exit":
        os._exit(7)
    else:
        globals()[how]()


if __name__ == "__main__":
    main(sys.argv[1])
