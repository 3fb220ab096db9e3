"""Scoring: what is measured (`protocol`), on what (`images`, `features`), how (`frechet`, `kid`, `recon`, `timing`).

A number is *extractor x resize x quantisation x reference x N x labels x estimator*. `EvalProtocol` freezes that tuple;
`Report` stores it beside every number and refuses to tabulate numbers of different protocols.

Every accumulator (`ImageAudit`, `Moments`, `FeatureBank`, `ReconMeter`, `CodeUsage`) is constant in memory or indexed
by image, and merges across processes by plain tensor addition: `accumulator.reduce(all_reduce)`, where `all_reduce`
takes a tensor and returns its sum over the processes.
"""
