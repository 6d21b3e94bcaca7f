"""The materials family: message-passing networks for molecules and crystals, with many heads.

Shapes in names: N atoms of a batch, E edges, G graphs (structures), T triplets of atoms, C channels, R radial functions,
S spherical components, 3 cartesian components, P properties, B branches (data sets). Lengths in angstrom, energies in eV.
An edge carries a message from its source to its target.
"""
