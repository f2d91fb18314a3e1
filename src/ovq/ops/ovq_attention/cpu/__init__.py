"""OVQ attention in one C++ kernel, built on request and never at import."""
