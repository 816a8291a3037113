//! Devices and what they are: the numbers that selection and launches are checked against.
//!
//! Source: CUDA Driver API, "Device Management".

use std::ffi::{CStr, c_char};
use std::fmt;

use super::error::{Error, Result};
use super::sys::{self, CUdevice, Driver, DriverVersion};
use crate::target::SmArch;

/// One GPU of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub(super) driver: &'static Driver,
    pub(super) raw: CUdevice,
    ordinal: u32,
}

/// The numbers of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index among the visible devices.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// Baseline target of its compute capability.
    pub arch: SmArch,
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
    /// Most shared memory that one CTA can opt in to, static and dynamic together, in bytes.
    pub smem_per_cta_bytes: u32,
    /// Shared memory of an SM, in bytes.
    pub smem_per_sm_bytes: u32,
    /// Most threads in a CTA.
    pub threads_per_cta: u32,
    /// Largest CTA, in threads, per dimension.
    pub cta_limit: [u32; 3],
    /// Largest grid, in CTAs, per dimension.
    pub grid_limit: [u32; 3],
    /// Peak SM clock in kHz, zero if the driver does not tell.
    pub clock_khz: u32,
    /// Peak memory clock in kHz, zero if the driver does not tell.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits, zero if the driver does not tell.
    pub memory_bus_bits: u32,
    /// Device memory, in bytes.
    pub memory_bytes: u64,
    /// Whether CTAs can be launched in clusters.
    pub cluster_launch: bool,
    /// CUDA version of the driver.
    pub driver_version: DriverVersion,
}

impl Device {
    /// How many devices the driver shows.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn count(driver: &'static Driver) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the driver writes one int.
        unsafe { driver.api.cuDeviceGetCount(&mut count) }?;
        Ok(count.max(0) as u32)
    }

    /// The device of this index.
    ///
    /// # Errors
    /// `NoDevice` beyond the last one.
    pub fn nth(driver: &'static Driver, ordinal: u32) -> Result<Self> {
        let count = Self::count(driver)?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let mut raw = 0;
        // SAFETY: the driver writes one device number.
        unsafe { driver.api.cuDeviceGet(&mut raw, ordinal as i32) }?;
        Ok(Self { driver, raw, ordinal })
    }

    /// The device with this raw number, as a context reports it. Numbers are ordinals.
    pub(super) fn of_raw(driver: &'static Driver, raw: CUdevice) -> Self {
        Self { driver, raw, ordinal: raw.max(0) as u32 }
    }

    /// Index among the visible devices.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The driver that shows this device.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The numbers of this device.
    ///
    /// # Errors
    /// Those of the driver calls.
    pub fn info(&self) -> Result<DeviceInfo> {
        let must = |attribute| self.attribute(attribute);
        // A driver may refuse attributes that it is too old or too new for.
        let may = |attribute| self.attribute(attribute).unwrap_or(0);
        let triple =
            |first| -> Result<[u32; 3]> { Ok([must(first)?, must(first + 1)?, must(first + 2)?]) };
        let capability =
            must(sys::DEVICE_CAPABILITY_MAJOR)? * 10 + must(sys::DEVICE_CAPABILITY_MINOR)?;
        let mut memory_bytes = 0;
        // SAFETY: the driver writes one size.
        unsafe { self.driver.api.cuDeviceTotalMem_v2(&mut memory_bytes, self.raw) }?;
        Ok(DeviceInfo {
            ordinal: self.ordinal,
            name: self.name()?,
            arch: SmArch::baseline(u16::try_from(capability).unwrap_or(u16::MAX)),
            num_sms: must(sys::DEVICE_NUM_SMS)?,
            l2_bytes: must(sys::DEVICE_L2_BYTES)?.into(),
            smem_per_cta_bytes: must(sys::DEVICE_SMEM_PER_CTA_OPTIN_BYTES)?,
            smem_per_sm_bytes: must(sys::DEVICE_SMEM_PER_SM_BYTES)?,
            threads_per_cta: must(sys::DEVICE_MAX_THREADS_PER_CTA)?,
            cta_limit: triple(sys::DEVICE_MAX_CTA_DIM_X)?,
            grid_limit: triple(sys::DEVICE_MAX_GRID_DIM_X)?,
            clock_khz: may(sys::DEVICE_CLOCK_RATE_KHZ),
            memory_clock_khz: may(sys::DEVICE_MEMORY_CLOCK_RATE_KHZ),
            memory_bus_bits: may(sys::DEVICE_MEMORY_BUS_WIDTH_BITS),
            memory_bytes: memory_bytes as u64,
            cluster_launch: may(sys::DEVICE_CLUSTER_LAUNCH) != 0,
            driver_version: self.driver.version(),
        })
    }

    fn name(&self) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most `len` characters with a final NUL; ours is one longer
        // still.
        unsafe { self.driver.api.cuDeviceGetName(name.as_mut_ptr(), 255, self.raw) }?;
        // SAFETY: the last of 256 characters stays NUL.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// One attribute by its number; negative values, which none of ours has, read as zero.
    fn attribute(&self, attribute: i32) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes one int.
        unsafe { self.driver.api.cuDeviceGetAttribute(&mut value, attribute, self.raw) }?;
        Ok(value.max(0) as u32)
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}, {} SMs, {} MiB L2, {} KiB smem per CTA, {} MiB, CUDA {})",
            self.name,
            self.arch,
            self.num_sms,
            self.l2_bytes >> 20,
            self.smem_per_cta_bytes >> 10,
            self.memory_bytes >> 20,
            self.driver_version
        )
    }
}
