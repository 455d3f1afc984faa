"""Names that were changed: the old ones work for one release, and say what they are called now."""

from __future__ import annotations

import importlib

import pytest
import torch

from mmdata.plan import BatchShare, Mixture, ShardSpan
from mmdata.train.losses import hard_negative_loss

RENAMED = [
    ("mmdata.plan", "Source", "ShardSpan"),
    ("mmdata.plan", "Stream", "BatchShare"),
    ("mmdata.train.miners", "SkipHottest", "DropHardest"),
    ("mmdata.train.miners", "Teacher", "TeacherMask"),
    ("mmdata.train.objective", "loss_at", "make_loss"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_renamed_old_name_is_the_new_one_and_warns(module: str, old: str, new: str):
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is now called {module}\.{new}; the old name goes"):
        assert getattr(home, old) is getattr(home, new)


@pytest.mark.parametrize(("old", "new"), [("streams", "shares"), ("sources", "spans")])
def test_renamed_old_attribute_is_the_new_one_and_warns(old: str, new: str):
    mixture = Mixture((BatchShare((ShardSpan(0, 1),)),))
    with pytest.warns(DeprecationWarning, match=rf"^Mixture\.{old} is now called Mixture\.{new}; the old name goes"):
        assert getattr(mixture, old) == getattr(mixture, new)


def test_renamed_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'mmdata\.loader' has no attribute 'Lodaer'$"):
        importlib.import_module("mmdata.loader").Lodaer  # noqa: B018


def test_renamed_old_argument_is_the_new_one_and_warns():
    features = torch.eye(3)
    expected = hard_negative_loss(features, features, torch.tensor(2.0), prior=0.1)
    with pytest.warns(
        DeprecationWarning, match=r"^hard_negative_loss's argument positive_share is now called prior; the"
    ):
        found = hard_negative_loss(features, features, torch.tensor(2.0), positive_share=0.1)  # type: ignore[call-arg]
    assert found == expected


def test_renamed_module_of_the_trainer_still_gives_it():
    from mmdata.train import loop
    from mmdata.train.run.trainer import Trainer

    said = r"^mmdata\.train\.loop\.Trainer is now called mmdata\.train\.run\.trainer\.Trainer; the old name goes"
    with pytest.warns(DeprecationWarning, match=said):
        assert loop.Trainer is Trainer
    assert not hasattr(loop, "__path__"), "which Python asks for at the import: no reason to warn"


def test_renamed_argument_given_under_both_names_is_an_error():
    from mmdata.renamed import renamed_arguments

    @renamed_arguments(old="new")
    def double(new: int) -> int:
        return 2 * new

    with pytest.warns(DeprecationWarning, match=r"^double's argument old is now called new; the old name goes with"):
        assert double(old=3) == 6
    with pytest.raises(TypeError, match=r"^double got both old and new, its new name$"):
        double(old=3, new=4)


def test_renamed_output_of_a_model_still_has_its_old_name():
    from mmdata.train import DualEncoderOutput

    output = DualEncoderOutput(*torch.zeros(2, 1, 1), negative_text_features=torch.ones(1))
    with pytest.warns(DeprecationWarning, match="extra_text_features is now called DualEncoderOutput.negative_text"):
        assert output.extra_text_features is output.negative_text_features
