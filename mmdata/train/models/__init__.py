"""Dual encoders.

- `dual_encoder`: DualEncoder = image tower, text tower, projections, logit_scale (and bias); settings in `model`.
- `towers`: the built-in towers, for any image shape and text length; `clip_sizes`: CLIP's towers by name (vit_b_32).
- `pretrained`: loads CLIP, SigLIP and pairs of towers with transformers; `transformers_towers` fits them in.
- Any module whose forward takes a batch and gives image and text features can stand in for a DualEncoder.
"""
