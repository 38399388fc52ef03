"""Creating ark groups, and what a group can tell about itself."""
