// A device "cuda:0" that is memory of the host. Operators copy their operands to the CPU, those that a build of torch for
// CUDA has kernels for as well.
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
template <class T>
using Maybe = std::optional<T>;

const at::Device kDevice(at::kCUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// Behind each buffer lie bytes that are NaN as numbers of any kind: a kernel that reads beyond the end is seen. Where
// kernels are compiled and not run, nothing is read, and writing these bytes would count as time of the host.
const char* const kInterprets = std::getenv("TRITON_INTERPRET");
const size_t kBehind = kInterprets && std::strcmp(kInterprets, "1") == 0 ? 1 << 18 : 0;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes + kBehind);
    std::memset(static_cast<char*>(data.get()) + bytes, 0xff, kBehind);
    data.unsafe_set_device(kDevice);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;

// One device with one stream, on which everything has been done when a call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
  at::Device getDevice() const override { return kDevice; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  c10::Stream getStream(at::Device) const noexcept override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

Tensor empty(IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device>, Maybe<bool>,
             Maybe<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                     Maybe<at::Device>, Maybe<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor on_host(const Tensor& x) {
  if (x.is_cpu()) return x;
  auto host = at::from_blob(x.storage().mutable_data(), {0}, x.options().device(at::kCPU));
  host.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return host;
}

long reads = 0;          // by the host, of what lies on the device
bool own_copies = false;  // of operands of an operator that runs on the host here, and of its results

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  reads += self.is_cpu() && !source.is_cpu() && !own_copies;
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  return target.resize_(source.sizes()).copy_(source);
}

at::Scalar item(const Tensor& x) {
  reads += !own_copies;
  return at::native::_local_scalar_dense_cpu(on_host(x));
}

void any_other(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Own {
    Own() { own_copies = true; }
    ~Own() { own_copies = false; }
  } until_it_is_left;
  at::native::cpu_fallback(op, stack);
}

void install() {
  static Guard guard;
  c10::impl::registerDeviceGuard(at::kCUDA, &guard);
  c10::SetAllocator(at::kCUDA, &memory, /*priority=*/255);
  // torch has made its own hooks and gives out references to them.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

  static torch::Library every(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  every.fallback(torch::CppFunction::makeFromBoxedFunction<&any_other>());

  static torch::Library m(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  const std::set<std::string> own = {
      "empty.memory_format", "empty_strided", "copy_", "_copy_from_and_resize", "_local_scalar_dense", "resize_",
      "set_.source_Storage", "set_.source_Storage_storage_offset", "as_strided", "unfold", "view",
      "_reshape_alias"};
  // A fallback serves those alone that have no kernel.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!own.count(full)) m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_other>());
  }
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

}  // namespace

extern "C" void install_device() { install(); }
extern "C" long host_reads() { return reads; }
