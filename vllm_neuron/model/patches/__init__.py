"""What this package changes of vLLM and torch in a process: each change, its reason, and when it can go.

Whoever supports another release looks here first. Everything that reaches into their modules to replace something is in
this folder, or where a part beneath or above this one needs it:

==================  ====================================================================================
here                changes
==================  ====================================================================================
``configuration``   variables of vLLM, its configuration classes, its parser
``building``        the model that vLLM builds and loads, over fake tensors too
``mixtures``        the routers and the opaque operator of a mixture of experts
``inspection``      two tracebacks in vLLM's log
``torchvision``     imports of torchvision, where there is none
==================  ====================================================================================

``serve/patches.py`` changes vLLM's engine and server, which a compile job has not; ``compile/patches.py`` changes torch
for capture and for its compiler. What vLLM offers for extensions, such as ``register_oot`` in ``model/mixtures.py``, is
used where it belongs.
"""
