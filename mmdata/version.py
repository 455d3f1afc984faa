"""The version of mmdata: also of a checkout that is on PYTHONPATH and was never installed."""

VERSION = "0.1.0"
