// As much of CUDA as torch's CPU build needs to compute gradients of tensors whose device is `cuda`: one GPU,
// with one stream, and generators. Nothing here computes a number: `pretend.py` does.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kGpu(c10::DeviceType::CUDA, 0);

struct GpuGenerator final : at::CPUGeneratorImpl {
  GpuGenerator() { device_ = kGpu; }
};

}  // namespace

namespace c10::impl {

struct PretendedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kGpu; }
  Device getDevice() const override { return kGpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);

}  // namespace c10::impl

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<GpuGenerator>(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
