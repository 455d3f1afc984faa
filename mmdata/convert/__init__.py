"""Raw corpora to shards: sources, the examination of a row, accounts, engines, publishing."""

from mmdata.convert.accounts import Accounts
from mmdata.convert.convert import Report, convert
from mmdata.convert.recipe import ConvertConfig, load_recipe

__all__ = ["Accounts", "ConvertConfig", "Report", "convert", "load_recipe"]
