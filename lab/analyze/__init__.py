"""``mpic analyze``: the papers' pictures of attention and KV, from one's own model and prompt.

``dense`` runs a prompt under a policy and keeps its attention, ``measures`` computes numbers from it, and ``figures``
draws them.
"""
