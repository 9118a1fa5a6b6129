"""`alignkit watch`: a page over a monitor's directory, live. Imports no web framework by itself."""
