"""Writes small folders in the layout of each published data set, with generated media."""

import csv
import json
import wave

import av
import numpy as np
import soundfile
from PIL import Image

SIZE = 32  # height and width of generated pictures


def text_file(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table_file(path, rows, delimiter=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


def sound_file(path, seconds=0.6, rate=16_000, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(size=len(time))
    soundfile.write(path, 0.4 * np.sin(2 * np.pi * (200 + 40 * seed) * time) + 0.05 * noise, rate, "PCM_16")


def empty_sound(path):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)


def picture(path, seed=0, size=(40, 36)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def film(path, seconds=3, fps=4, sound=False, codec="mpeg4"):
    """A video whose frame i has brightness 10 + 15 i in all pixels; with `sound`, a tone as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        picture_track = container.add_stream(codec, rate=fps)
        picture_track.width = picture_track.height = SIZE
        picture_track.pix_fmt = "yuv420p"
        picture_track.bit_rate = 400_000
        tone_track = container.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for number in range(seconds * fps):
            pixels = np.full((SIZE, SIZE, 3), 10 + 15 * number, np.uint8)
            container.mux(picture_track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(picture_track.encode())
        if tone_track is not None:
            time = np.arange(seconds * 16_000) / 16_000
            tone = (0.4 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
            frame.sample_rate = 16_000
            container.mux(tone_track.encode(frame))
            container.mux(tone_track.encode())


def iemocap(root):
    root = root / "IEMOCAP_full_release"
    labels = ["ang", "neu", "sad", "exc", "hap", "fru"]
    for session in range(1, 6):
        place = root / f"Session{session}"
        for dialog in (f"Ses0{session}F_impro01", f"Ses0{session}F_script01_1"):
            names = [f"{dialog}_{'FM'[i % 2]}{i:03d}" for i in range(6)]
            rated = [
                f"[{i}.0000 - {i}.9000]\t{name}\t{label}\t[2.5, 2.5, 2.5]"
                for i, (name, label) in enumerate(zip(names, labels, strict=True))
            ]
            header = ["% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]", ""]
            votes = ["C-E1:\tNeutral;\t()", "A-E1:\tval 3; act 2; dom  2;\t()"]
            text_file(place / "dialog" / "EmoEvaluation" / f"{dialog}.txt", [*header, *rated, *votes])
            said = [f"{name} [00{i}.0000-00{i}.9000]: the cat {i}" for i, name in enumerate(names)]
            text_file(place / "dialog" / "transcriptions" / f"{dialog}.txt", said)
            for i, name in enumerate(names):
                if "impro" in dialog:
                    sound_file(place / "sentences" / "wav" / dialog / f"{name}.wav", 0.2 + 0.05 * i, seed=i)


def msp_improv(root):
    lines = []
    for session in range(1, 7):
        for gender in "FM":
            for i, (kind, label) in enumerate(zip("STPRST", "NHSAXA", strict=True)):
                name = f"S{i + 1:02d}A-{gender}0{session}-{kind}-FM0{i}"
                lines += [f"UTD-IMPROV-{name}.avi; {label}; A:2.5; V:3.0;", "  Worker1; Neutral; A:2; V:3;", ""]
                wav = root / "Audio" / f"session{session}" / f"S{i + 1:02d}A" / kind / f"MSP-IMPROV-{name}.wav"
                if kind in "ST":
                    sound_file(wav, 0.2, rate=44_100, seed=i)
    text_file(root / "Evalution.txt", lines)


def food101(root):
    titles = {"train": [], "test": []}
    for label in ("apple_pie", "ramen", "tacos"):
        for i in range(16):
            half = "train" if i < 11 else "test"
            picture(root / "images" / half / label / f"{label}_{i}.jpg", i)
            titles[half].append([f"{label}_{i}.jpg", f"the {label} cat", label])
            if i != 3:  # one image of each class has no text
                text_file(root / "texts_txt" / label / f"{label}_{i}.txt", [f"the cat {label}"])
    for half, rows in titles.items():
        table_file(root / "texts" / f"{half}_titles.csv", rows)


CREMA_LABELS = ("NEU", "HAP", "SAD", "FEA", "DIS", "ANG")


def crema_d(root):
    names = [f"{1001 + actor}_DFA_{label}_XX" for actor in range(5) for label in CREMA_LABELS[actor % 2 :: 2]]
    for i, name in enumerate(names):
        sound_file(root / "AudioWAV" / f"{name}.wav", 0.9 + 0.1 * i, seed=i)
        film(root / "VideoFlash" / f"{name}.flv", 3, codec="flv1")
    rows = [[name, name.split("_")[2]] for name in names]
    table_file(root / "train.csv", rows[:12])
    table_file(root / "test.csv", rows[12:])


def ave(root):
    lines = []
    for i in range(6):
        film(root / "AVE" / f"vid_{i}.mp4", 4, sound=True)
        lines.append(f"{['Church bell', 'Bark'][i % 2]}&vid_{i}&good&{i % 2}&{2 + i % 2}")
    lines.append("Bark&vid_0&good&2&4")  # a second segment of a video
    text_file(root / "Annotations.txt", ["Category&VideoID&Quality&StartTime&EndTime", *lines])
    text_file(root / "trainSet.txt", [*lines[:4], lines[6]])
    text_file(root / "valSet.txt", lines[4:5])
    text_file(root / "testSet.txt", lines[5:6])


def cmu(root, name="mosei", widths=(300, 74, 35), rows=(8, 3, 4), steps=12):
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count in zip(("train", "valid", "test"), rows, strict=True):
        for modality, width in zip(("text", "audio", "vision"), widths, strict=True):
            x = draw.normal(size=(count, steps, width)).astype(np.float32)
            x[:, -3:] = 0.0
            arrays[f"{part}_{modality}"] = x
        arrays[f"{part}_audio"][0, 0, 0] = -np.inf
        arrays[f"{part}_audio"][0, 1, 1] = np.nan
        arrays[f"{part}_labels"] = draw.uniform(-3, 3, (count, 1, 1)).astype(np.float32)
        arrays[f"{part}_id"] = np.array([f"{part}{i // 2}[{i}]" for i in range(count)])
    root.mkdir(parents=True, exist_ok=True)
    np.savez(root / f"{name}.npz", **arrays)
    return arrays


KU_ACTIVITIES = (
    *("0.Stand", "1.Sit", "2.Talk-sit", "3.Talk-stand", "4.Stand-sit", "5.Lay", "6.Lay-stand", "7.Pick", "8.Jump"),
    *("9.Push-up", "10.Sit-up", "11.Walk", "12.Walk-backward", "13.Walk-circle", "14.Run", "15.Stair-up"),
    *("16.Stair-down", "17.Table-tennis"),
)


def ku_har(root):
    draw = np.random.default_rng(0)
    for i, activity in enumerate(KU_ACTIVITIES):
        for subject in (1001, 1002, 1003, 1004, 1005, 1101):
            path = root / "Trimmed_interpolated_data" / activity / f"{subject}_{chr(65 + i)}_1.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = 600 if activity in ("0.Stand", "11.Walk") else 300
            table = draw.normal(size=(lines, 8))
            table[:, 0] = table[:, 4] = np.arange(lines) / 100
            np.savetxt(path, table, delimiter=",", fmt="%.3f")


def meld(root):
    emotions = ["neutral", "sadness", "joy", "anger", "surprise", "disgust", "neutral", "joy"]
    header = ["Sr No.", "Utterance", "Speaker", "Emotion", "Sentiment", "Dialogue_ID", "Utterance_ID"]
    header += ["Season", "Episode", "StartTime", "EndTime"]
    parts = {"train": "train_splits", "dev": "dev_splits_complete", "test": "output_repeated_splits_test"}
    for part, videos in parts.items():
        rows = [header]
        for i, emotion in enumerate(emotions):
            rows.append([i, f"the cat, {i}", ["Ann", "Bob"][i % 2], emotion, "x", 0, i, 1, 2, "0", "1"])
            if i % 3:
                sound_file(root / videos / "waves" / f"dia0_utt{i}.wav", 0.2, seed=i)
            else:
                film(root / videos / f"dia0_utt{i}.mp4", 1, sound=True)
        table_file(root / f"{part}_sent_emo.csv", rows)


def hateful_memes(root):
    for part, first, count in (("train", 0, 6), ("dev_seen", 6, 2), ("test_seen", 8, 3)):
        lines = []
        for i in range(first, first + count):
            picture(root / "img" / f"{i:05d}.png", i)
            entry = {"id": i, "img": f"img/{i:05d}.png", "label": i % 2, "text": f"the cat {i}"}
            lines.append(json.dumps(entry))
        text_file(root / f"{part}.jsonl", lines)


def crisismmd(root):
    labels = ["not_humanitarian", "vehicle_damage", "affected_individuals"]
    header = ["event_name", "tweet_id", "image_id", "tweet_text", "image", "label", "label_text", "label_image"]
    header += ["label_text_image"]
    number = 0
    for part, count in (("train", 6), ("dev", 2), ("test", 3)):
        rows = [header]
        for _ in range(count):
            image = f"data_image/flood/1_1_2017/{number}_0.jpg"
            picture(root / image, number)
            label = labels[number % 3]
            said = 'a "cat http://t.co/x'
            rows.append(["flood", str(number), f"{number}_0", said, image, label, labels[0], label, "Positive"])
            number += 1
        place = root / "crisismmd_datasplit_all" / f"task_humanitarian_text_img_{part}.tsv"
        text_file(place, ["\t".join(row) for row in rows])


LEADS = ("I", "II", "III", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6")


def ptb_xl(root):
    draw = np.random.default_rng(0)
    table_file(
        root / "scp_statements.csv",
        [
            ["", "description", "diagnostic", "form", "rhythm", "diagnostic_class"],
            ["NORM", "normal", "1.0", "", "", "NORM"],
            ["IMI", "infarction", "1.0", "", "", "MI"],
            ["SR", "sinus rhythm", "", "", "1.0", ""],
        ],
    )
    rows = [["ecg_id", "patient_id", "site", "scp_codes", "strat_fold", "filename_lr", "filename_hr"]]
    for i in range(14):
        codes = [{"NORM": 100.0, "SR": 0.0}, {"IMI": 100.0}][i % 2]
        if i == 12:
            codes = {"NORM": 100.0, "IMI": 100.0}  # two superclasses
        context = "" if i == 13 else f"{i % 2}.0"
        name = f"records100/00000/{i:05d}_lr"
        rows.append([i, 7, context, str(codes), 9 if i == 10 else 10 if i == 11 else i % 8 + 1, name, name])
        counts = draw.integers(-800, 800, (1000, 12)).astype("<i2")
        path = root / f"{name}.dat"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(counts.tobytes())
        head = [f"{i:05d}_lr 12 100 1000"]
        head += [f"{i:05d}_lr.dat 16 1000.0(0)/mV 16 0 {counts[0, k]} 0 0 {lead}" for k, lead in enumerate(LEADS)]
        text_file(root / f"{name}.hea", head)
    table_file(root / "ptbxl_database.csv", rows)


def hugging_face(root):
    import io

    import datasets

    def image(seed):
        pixels = np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "png")
        return {"bytes": content.getvalue(), "path": None}

    def part(count):
        rows = {
            "picture": [image(i) for i in range(count)],
            "caption": [f"the cat {i}" for i in range(count)],
            "sensor": [[float(i), 1.0, 2.0] for i in range(count)],
            "who": [f"user{i % 2}" for i in range(count)],
            "kind": [i % 2 for i in range(count)],
        }
        table = datasets.Dataset.from_dict(rows)
        names = datasets.ClassLabel(names=["cat", "dog"])
        return table.cast_column("picture", datasets.Image()).cast_column("kind", names)

    root.mkdir(parents=True, exist_ok=True)
    datasets.DatasetDict({"train": part(6), "test": part(3)}).save_to_disk(str(root))
