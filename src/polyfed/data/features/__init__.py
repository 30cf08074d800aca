"""How are media files turned into features once, and read from then on?

- `listing`: what a data set's folder holds (`Listing`, `Sample`), before any media file is opened.
- `extraction`: runs the extractors over a listing, with workers and a cache, and writes one array for each modality.
- `prepared`: a folder of such arrays: its manifest (`Prepared`), its checks, and the table that it gives.
- `prepare`: the function behind `polyfed data prepare NAME`.

The extractors themselves are in `polyfed.data.media`, the data sets that use them in `polyfed.data.sources`.
"""
