"""HTTP. Composes everything; imported by nobody but chorus/."""
