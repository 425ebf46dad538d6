"""One file per revision, in order: 0001_….py, 0002_….py."""
