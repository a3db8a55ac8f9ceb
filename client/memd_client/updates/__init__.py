"""The targets of an optimizer's step, their gradients' norm and their states."""
