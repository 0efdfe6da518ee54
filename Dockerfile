# planner and a torch for the host's driver: 'planner doctor' prints the release and the CUDA to build for. CUDA's
# libraries come with torch; of the host only the driver and NVIDIA's container toolkit are needed.
#
#     docker build --build-arg CUDA=cu126 --build-arg TORCH=2.14 -t planner:cu126 .
#     docker run --rm --gpus all --shm-size=8g --ulimit memlock=-1 --ulimit stack=67108864 \
#         -v "$PWD:/work" -w /work planner:cu126 doctor
FROM python:3.12-slim

# torch.compile calls a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ \
    && rm -rf /var/lib/apt/lists/*

ARG CUDA=cu130
ARG TORCH=2.14
RUN pip install --no-cache-dir "torch==${TORCH}.*" torchvision \
    --index-url "https://download.pytorch.org/whl/${CUDA}"

COPY . /planner
RUN pip install --no-cache-dir "/planner[timm]"

ENTRYPOINT ["planner"]
