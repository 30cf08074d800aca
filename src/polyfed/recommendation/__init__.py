"""Which method for these data, under these policies? `polyfed.recommend` and `polyfed recommend`.

- `candidates`: which methods and options no policy refuses. The answer is exact, because announcements are static.
- `verdicts`: keeps these answers in the folder until something that they depend on changes.
- `pilot`: the runs, in stages that keep the time; it goes on where it was stopped.
- `conclusion`: the statistics, and the sentences that are made from the numbers.
- `recommend`: joins them, and writes the recipe, the page and recommendation.json.
"""

from polyfed.recommendation.recommend import Recommendation, recommend

__all__ = ["Recommendation", "recommend"]
