"""Extraction of features: media files are turned into features once, and later runs read the features.

- `listing`: the samples in a data set's folder (`Listing`, `Sample`), before any media file is opened.
- `extraction`: runs the extractors over a listing, with workers and a cache, and writes one array for each modality.
- `prepared`: a folder of such arrays: its manifest (`Prepared`), its checks, and its table.
- `prepare`: the function behind `polyfed data prepare NAME`.

The extractors are in `polyfed.data.media`. The data sets that use them are in `polyfed.data.sources`.
"""
