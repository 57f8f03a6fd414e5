"""One opened archive: views of its tensors, its module tree, parts, payloads, digests, damage."""
