"""Features that wait: joined as they stand where that needs no copy."""

import torch

from quire.speculate.features import FeatureRun, join


def test_features_of_one_step_are_joined_without_a_copy():
    features, other = torch.arange(20.0).view(10, 2), torch.ones(3, 2)
    whole = join([FeatureRun(features, 0, 4), FeatureRun(features, 4, 6)])
    assert whole is features
    part = join([FeatureRun(features, 2, 1), FeatureRun(features, 3, 4)])
    assert part.data_ptr() == features[2].data_ptr()
    assert torch.equal(part, features[2:7])
    mixed = join([FeatureRun(features, 2, 1), FeatureRun(features, 5, 2), FeatureRun(other, 1, 1)])
    assert torch.equal(mixed, torch.cat([features[2:3], features[5:7], other[1:2]]))
