"""Vision towers that Quire computes itself: pictures of several requests in one pass, without padding."""
