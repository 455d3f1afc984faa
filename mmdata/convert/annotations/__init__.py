"""Corpora whose images have boxes: COCO's instances and keypoints, PASCAL VOC, Visual Genome's regions.

`find` tells such a corpus by its content and opens it as a `Source`; a folder may be one of several parts.
A sample's JSON has "boxes", one form for all of them (`boxes`), in pixels of the corpus's own file.
`coco`, `voc` and `visual_genome` are the sources. JSON is streamed entry by entry (`json_stream`).
"""

from mmdata.convert.annotations.find import annotation_parts, open_annotated

__all__ = ["annotation_parts", "open_annotated"]
