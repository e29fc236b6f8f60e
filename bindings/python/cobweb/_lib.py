"""Finds and loads the library: $COBWEB_LIBRARY, a copy beside this file, the system's libcobweb.so.0."""
import ctypes as C
import os
from pathlib import Path

from . import _abi

MAJOR, MINOR = 0, 1


def _open():
    named = os.environ.get("COBWEB_LIBRARY")
    if named:
        return C.CDLL(named)
    bundled = Path(__file__).with_name("libcobweb.so.0")
    return C.CDLL(str(bundled) if bundled.exists() else "libcobweb.so.0")


lib = _open()
for _name, (_result, _args) in _abi.FUNCTIONS.items():
    _f = getattr(lib, "cobweb_" + _name)
    _f.restype, _f.argtypes = _result, _args

_version = lib.cobweb_version()
if _version >> 16 != MAJOR or (_version >> 8 & 0xFF) < MINOR:
    raise ImportError(f"libcobweb {_version >> 16}.{_version >> 8 & 0xff} does not fit bindings for {MAJOR}.{MINOR}")
