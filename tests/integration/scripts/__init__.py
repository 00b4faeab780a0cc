"""Scripts for the tests of the launcher, most of which know nothing of zeroguard."""
